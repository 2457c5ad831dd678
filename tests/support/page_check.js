// Finds the defects of a report that only a browser shows, and sends them as JSON to the page around its frame.
function shown(element) {
  const box = element.getBoundingClientRect();
  return box.width > 1 && box.height > 1 && getComputedStyle(element).visibility !== "hidden";
}

function name(element) {
  const text = element.textContent.trim().replace(/\s+/g, " ").slice(0, 40);
  return `${element.tagName.toLowerCase()}.${element.getAttribute("class") || ""} "${text}"`;
}

function channels(colour) {
  const found = colour.match(/[\d.]+/g);
  return found ? found.map(Number) : [0, 0, 0, 0];
}

function luminance([red, green, blue]) {
  const linear = [red, green, blue].map((value) => {
    const share = value / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function background(element) {
  for (let each = element; each; each = each.parentElement) {
    const colour = channels(getComputedStyle(each).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
}

function contrast(element) {
  const style = getComputedStyle(element);
  const front = luminance(channels(element.closest("svg") ? style.fill : style.color));
  const back = luminance(background(element));
  return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
}

function texts() {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = new Set();
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (walker.currentNode.textContent.trim() && !parent.closest("title, script, style")) found.add(parent);
  }
  return [...found].filter(shown);
}

function overlap(a, b) {
  const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  if (width <= 0 || height <= 0) return 0;
  return (width * height) / Math.min(a.width * a.height, b.width * b.height);
}

function defects() {
  const found = [];
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth + 1) found.push(`the page is ${root.scrollWidth} px wide in ${innerWidth} px`);
  for (const element of document.querySelectorAll("body *:not(svg *)")) {
    const style = getComputedStyle(element);
    if (style.clipPath !== "none" || !shown(element) || element.scrollWidth <= element.clientWidth + 1) continue;
    if (style.overflowX === "hidden" || style.overflowX === "clip") found.push(`clipped: ${name(element)}`);
    if (style.overflowX === "auto" && style.backgroundImage === "none") found.push(`no sign of scrolling: ${name(element)}`);
  }
  for (const drawing of document.querySelectorAll("svg, img")) {
    if (!drawing.getAttribute("aria-label") && !drawing.getAttribute("alt")) found.push("a picture without alt text");
    if (!shown(drawing)) continue;
    const box = drawing.getBoundingClientRect();
    const labels = [...drawing.querySelectorAll("text")].map((each) => [each.textContent, each.getBoundingClientRect()]);
    const figure = drawing.closest("figure")?.id;
    labels.forEach(([text, place], index) => {
      if (place.left < box.left - 2 || place.right > box.right + 2 || place.top < box.top - 2 || place.bottom > box.bottom + 2) {
        found.push(`${figure}: "${text}" is outside of the figure`);
      }
      for (const [other, second] of labels.slice(index + 1)) {
        if (overlap(place, second) > 0.2) found.push(`${figure}: "${text}" overlaps "${other}"`);
      }
    });
  }
  for (const region of document.querySelectorAll(".scroll")) {
    if (!shown(region)) continue;
    const end = region.getBoundingClientRect().right;
    for (const heading of region.querySelectorAll("thead th")) {
      const text = heading.textContent.trim();
      if (/^p(50|95)$/.test(text) && heading.getBoundingClientRect().right > end + 1) found.push(`${text} needs scrolling`);
    }
  }
  for (const dot of document.querySelectorAll(".verdict .dot")) {
    const line = parseFloat(getComputedStyle(dot.parentElement).fontSize) * 1.6;
    const below = dot.getBoundingClientRect().bottom - dot.parentElement.getBoundingClientRect().top;
    if (below > line) found.push(`the dot is below the first line: ${name(dot.parentElement)}`);
  }
  for (const element of texts()) {
    if (element.closest(".masthead a, [hidden]")) continue;
    const ratio = contrast(element);
    if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)}: ${name(element)}`);
  }
  const references = [...document.querySelectorAll("[src], link[href], image, use")].map(
    (each) => each.getAttribute("src") || each.getAttribute("href") || each.getAttribute("xlink:href") || "",
  );
  const requests = [
    ...performance.getEntriesByType("resource").map((each) => each.name),
    ...references.filter((each) => each && !/^(#|data:)/.test(each)),
  ];
  return { width: innerWidth, defects: [...found, ...requests.map((each) => `request to ${each}`)] };
}

parent.postMessage(defects(), "*");
