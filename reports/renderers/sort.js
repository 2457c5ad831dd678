for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const cell = row.cells[column];
    return "key" in cell.dataset ? Number(cell.dataset.key) : cell.textContent.trim();
  };
  const compare = (a, b) => (typeof a === typeof b ? (typeof a === "number" ? a - b : a.localeCompare(b)) : 0);
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      const isMissing = ([key]) => key === "" || key === "\u2013";
      const known = rows.filter((row) => !isMissing(row));
      known.sort((a, b) => direction * compare(a[0], b[0]));
      body.append(...[...known, ...rows.filter(isMissing)].map(([, row]) => row));
    });
  });
}
