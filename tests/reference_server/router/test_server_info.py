import json
from pathlib import Path

import pytest

from reference_server.configuration.config import RouterConfig
from reference_server.configuration.config_fields import Secret
from reference_server.configuration.settings import load
from reference_server.errors import ArgumentError
from reference_server.messages import ModelInfo, WarmupReply
from reference_server.router.server_info import described_settings, server_info, tuned_from
from reference_server.router.tokenizer_files import TokenizerFiles
from reference_server.router.validation.token_limits import TokenLimits

LIMITS = TokenLimits(1000, 2000, 4096, 65536)


def test_settings_show_their_source_and_mask_secrets():
    loaded = load(RouterConfig, ["--port", "5", "--api-key", "hidden"], {"MAX_BEST_OF": "3"})
    settings = described_settings(loaded, LIMITS, {})

    assert settings["port"] == {"value": 5, "source": "flag"}
    assert settings["max_best_of"] == {"value": 3, "source": "environment"}
    assert settings["api_key"] == {"value": "***", "source": "flag"}
    assert settings["max_input_tokens"]["source"] == "derived"
    assert isinstance(loaded.config.api_key, Secret)
    assert "hidden" not in str(settings)


def test_the_launchers_settings_are_passed_on():
    variables = {"LAUNCH_SETTINGS": '{"attention": {"value": "auto", "source": "default"}}'}
    loaded = load(RouterConfig, ["--max-input-tokens", "1000"], variables)
    settings = described_settings(loaded, LIMITS, {"prefill": "torch", "decode": "torch", "reason": "no accelerator"})

    assert settings["attention"] == {
        "value": "torch for prefill, torch for decode",
        "source": "derived",
        "reason": "no accelerator",
    }
    assert "max_input_tokens" not in settings
    assert settings["max_total_tokens"]["value"] == 2000


@pytest.mark.parametrize(
    ("model", "may_continue"),
    [({"model_type": "llama"}, True), ({"model_type": "paligemma"}, False), ({"is_encoder_decoder": True}, False)],
)
def test_a_generation_continues_only_where_generated_tokens_can_become_a_prompt(
    tmp_path: Path, model: dict[str, object], may_continue: bool
):
    (tmp_path / "config.json").write_text(json.dumps(model))
    files = TokenizerFiles("m", tmp_path, tmp_path)

    info = server_info(
        load(RouterConfig, [], {}), files, LIMITS, ModelInfo(False, "torch.float32", "cpu"), WarmupReply(9, 5, 9)
    )

    assert info.limits.may_continue == may_continue


@pytest.mark.parametrize(
    ("text", "tuned"),
    [
        (None, None),
        ("night/3", {"study": "night", "trial": 3, "confirmed": False}),
        ("a/b/3/confirmed", {"study": "a/b", "trial": 3, "confirmed": True}),
    ],
)
def test_tuned_by(text: str | None, tuned: object):
    assert tuned_from(text) == tuned


@pytest.mark.parametrize("text", ["night", "night/x", "/3"])
def test_a_wrong_tuned_by_is_refused(text: str):
    with pytest.raises(ArgumentError, match="not STUDY/TRIAL"):
        tuned_from(text)


def test_info_has_the_block_size_of_the_cache(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    files = TokenizerFiles("m", tmp_path, tmp_path)
    shard, warm = ModelInfo(False, "torch.float32", "cpu", block_size=256), WarmupReply(9, 5, 9)

    own = server_info(load(RouterConfig, [], {}), files, LIMITS, shard, warm)
    foreign = server_info(load(RouterConfig, ["--grpc-schema", "v2"], {}), files, LIMITS, shard, warm)

    assert own.engine.to_json()["block_size"] == 256
    assert foreign.engine.block_size == 16
