"""The token of a storage that other machines use: from the environment, or a new one."""

import secrets

from loadgen.config.parsing import environment

TOKEN_VARIABLE = "TGI_TUNE_STORAGE_TOKEN"


def token_of_environment() -> str:
    """The token; empty if the variable is not set."""
    return environment(TOKEN_VARIABLE).get(TOKEN_VARIABLE, "")


def new_token() -> str:
    return secrets.token_urlsafe(24)
