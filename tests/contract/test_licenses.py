"""The licences of all packages that an installation with its extras brings: an unknown or another one fails."""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

EXTRAS = ("server", "grammar", "quantization", "otlp")
ALLOWED = re.compile(
    r"\b(MIT(-0|-CMU)?|BSD|[0-9]-Clause|0BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public License"
    r"|HPND|Unlicense|Zlib|CC0|OFL|CNRI|ZPL|BSL|Boost)\b",
    re.IGNORECASE,
)
DENIED = re.compile(r"\b(AGPL|GPL|SSPL|BUSL|Commons Clause|proprietary|non-?commercial)\b|Affero", re.IGNORECASE)
# Libraries of CUDA, which only a GPU build of torch brings, under their vendor's terms.
VENDOR = ("nvidia-", "cuda-")


def test_every_dependency_has_a_permissive_licence():
    packages = {name: each for name, each in dependencies().items() if not name.startswith(VENDOR)}
    licences = {name: licence_of(each) for name, each in packages.items()}

    assert len(licences) > 40
    assert {name: text for name, text in licences.items() if not is_permissive(text)} == {}


def test_an_unknown_or_a_denied_licence_is_not_permissive():
    assert [is_permissive(text) for text in ("MIT", "Apache-2.0 OR GPL-2.0", "", "AGPL-3.0", "SSPL-1.0", "Own")] == [
        *(True, True),
        *(False, False, False, False),
    ]


def is_permissive(licence: str) -> bool:
    """Whether one alternative of the licence is known and not denied."""
    parts = re.split(r"\bOR\b|;", licence)
    return any(ALLOWED.search(part) and not DENIED.search(part) for part in parts)


def licence_of(package: Distribution) -> str:
    """SPDX expression, else the classifiers, else the first line of the licence field."""
    metadata = package.metadata
    classifiers = [each for each in metadata.get_all("Classifier") or [] if each.startswith("License ::")]
    text = metadata.get("License-Expression") or "; ".join(classifiers) or metadata.get("License") or ""
    return str(text).strip().partition("\n")[0]


def dependencies() -> dict[str, Distribution]:
    """The installed packages that the product's requirements bring, by name."""
    found: dict[str, Distribution] = {}
    waiting = [("tgi-bench", frozenset(EXTRAS))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            # Of another platform, or of an extra that is not installed.
            continue
        found[name] = package
        for line in package.requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                key = (requirement.name.lower(), frozenset(requirement.extras))
                if key not in seen:
                    seen.add(key)
                    waiting.append(key)
    del found["tgi-bench"]
    return found
