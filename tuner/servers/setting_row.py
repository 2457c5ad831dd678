"""The settings of a profile as rows of text: flags, values, default, and use in a study."""

from collections.abc import Mapping
from typing import Any

from tuner.config import ParamSection
from tuner.servers.server_profile import ServerProfile, SettingSection


def setting_rows(
    profile: ServerProfile, fixed: Mapping[str, Any], searched: Mapping[str, ParamSection]
) -> list[dict[str, str]]:
    """One row for each setting of a profile. Column `here`: the searched values or the fixed value in this study."""
    return [
        {
            "setting": name,
            "set by": set_by(each),
            "values": values_of(each),
            "default": "the server's" if each.default is None else value_text(each.default),
            "here": f"fixed: {value_text(fixed[name])}" if name in fixed else _searched(searched.get(name)),
            "help": each.help,
        }
        for name, each in profile.setting.items()
    ]


def set_by(setting: SettingSection) -> str:
    """The flags or the environment variable of a setting."""
    return " or ".join(
        word for word in (setting.flag, setting.flag_true, setting.flag_false, setting.env) if word is not None
    )


def values_of(setting: SettingSection | ParamSection) -> str:
    """The possible values of a setting."""
    if setting.values:
        return ", ".join(map(value_text, setting.values))
    if setting.low is not None and setting.high is not None:
        unit = f", multiples of {setting.multiple_of}" if setting.multiple_of else ""
        return f"{setting.type} {setting.low:.10g} to {setting.high:.10g}{unit}"
    return "true or false" if setting.type == "bool" else setting.type


def value_text(value: object) -> str:
    """A value as a space file has it: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _searched(param: ParamSection | None) -> str:
    return f"searched: {values_of(param)}" if param is not None else ""
