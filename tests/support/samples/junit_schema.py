"""The common JUnit schemas as a table: Ant's (2011) and Jenkins' (xunit plugin, junit-10) both hold.

`problems` names everything in a document that either of them refuses. Attributes map to (is required, pattern).
"""

import re
from dataclasses import dataclass
from xml.etree.ElementTree import Element

TOKEN = r"\S(?:.*\S)?"
COUNT = r"\d+"
DECIMAL = r"\d+(?:\.\d+)?"
MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
ANY = r"(?s).*"


@dataclass(frozen=True)
class Allowed:
    """Attributes of an element, and a pattern for the names of its children, each followed by a space."""

    attributes: dict[str, tuple[bool, str]]
    children: str = ""


OUTCOME = Allowed({"type": (True, ANY), "message": (False, ANY)})
SCHEMA = {
    "testsuites": Allowed({}, "(testsuite )*"),
    "testsuite": Allowed(
        {
            "package": (True, TOKEN),
            "id": (True, COUNT),
            "name": (True, TOKEN),
            "timestamp": (True, MOMENT),
            "hostname": (True, TOKEN),
            "tests": (True, COUNT),
            "failures": (True, COUNT),
            "errors": (True, COUNT),
            "skipped": (False, COUNT),
            "time": (True, DECIMAL),
        },
        "properties (testcase )*system-out system-err ",
    ),
    "properties": Allowed({}, "(property )*"),
    "property": Allowed({"name": (True, TOKEN), "value": (True, ANY)}),
    "testcase": Allowed(
        {"name": (True, TOKEN), "classname": (True, TOKEN), "time": (True, DECIMAL)}, "(skipped |error |failure )?"
    ),
    "failure": OUTCOME,
    "error": OUTCOME,
    "skipped": OUTCOME,
    "system-out": Allowed({}),
    "system-err": Allowed({}),
}


def problems(element: Element, where: str = "") -> list[str]:
    """Everything that the schemas refuse in an element and below it."""
    where = f"{where}/{element.tag}"
    allowed = SCHEMA.get(element.tag)
    if allowed is None:
        return [f"{where} is no element"]
    found = [
        f"{where} lacks {name}" for name, (must, _) in allowed.attributes.items() if must and name not in element.attrib
    ]
    for name, value in element.attrib.items():
        if name not in allowed.attributes:
            found.append(f"{where} has {name}")
        elif re.fullmatch(allowed.attributes[name][1], value) is None:
            found.append(f"{where}: {name} is {value!r}")
    children = "".join(f"{child.tag} " for child in element)
    if re.fullmatch(allowed.children, children) is None:
        found.append(f"{where} holds {children}")
    return found + [problem for child in element for problem in problems(child, where)]
