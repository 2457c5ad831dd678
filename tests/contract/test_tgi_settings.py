"""Every flag and variable of TGI 3.3 is honoured, or refused or named with a reason; none is ignored in silence.

The names are those of TGI's launcher/src/main.rs, backends/v3/src/main.rs, benchmark/src/main.rs and server/ of
January 2026; those of `EARLIER` had an effect in releases before.
"""

import pytest

from reference_server.configuration.config_fields import flag_of, source_of, variables_of
from reference_server.configuration.ignored_variables import IGNORED_VARIABLES, ignored_variables
from reference_server.configuration.settings import COMMANDS
from reference_server.launcher.sagemaker import VARIABLES as SAGEMAKER

FLAGS = {
    "launcher": """--model-id --revision --validation-workers --sharded --num-shard --quantize --speculate --dtype
        --kv-cache-dtype --trust-remote-code --max-concurrent-requests --max-best-of --max-stop-sequences
        --max-top-n-tokens --max-input-tokens --max-input-length --max-total-tokens --waiting-served-ratio
        --max-batch-prefill-tokens --max-batch-total-tokens --max-waiting-tokens --max-batch-size --cuda-graphs
        --hostname --port --prometheus-port --shard-uds-path --master-addr --master-port --huggingface-hub-cache
        --weights-cache-override --disable-custom-kernels --cuda-memory-fraction --rope-scaling --rope-factor
        --json-output --otlp-endpoint --otlp-service-name --cors-allow-origin --api-key --watermark-gamma
        --watermark-delta --ngrok --ngrok-authtoken --ngrok-edge --tokenizer-config-path --disable-grammar-support
        --env --max-client-batch-size --lora-adapters --usage-stats --payload-limit --enable-prefill-logprobs
        --graceful-termination-timeout""",
    "router": """--max-concurrent-requests --max-best-of --max-stop-sequences --max-top-n-tokens --max-input-tokens
        --max-total-tokens --waiting-served-ratio --max-batch-prefill-tokens --max-batch-total-tokens
        --max-waiting-tokens --max-batch-size --hostname --port --prometheus-port --master-shard-uds-path
        --tokenizer-name --tokenizer-config-path --revision --trust-remote-code --validation-workers --api-key
        --json-output --otlp-endpoint --otlp-service-name --cors-allow-origin --ngrok --ngrok-authtoken --ngrok-edge
        --disable-grammar-support --max-client-batch-size --usage-stats --payload-limit --max-image-fetch-size""",
    "serve": """--revision --sharded --quantize --speculate --dtype --kv-cache-dtype --trust-remote-code --uds-path
        --logger-level --json-output --otlp-endpoint --otlp-service-name --max-input-tokens""",
    "download-weights": """--revision --extension --auto-convert --logger-level --json-output --trust-remote-code
        --merge-lora""",
    "quantize": """--revision --logger-level --json-output --trust-remote-code --upload-to-model-id --percdamp
        --act-order --groupsize""",
    "benchmark": """--tokenizer-name --revision --batch-size --sequence-length --decode-length --runs --warmups
        --master-shard-uds-path --temperature --top-k --top-p --typical-p --repetition-penalty --frequency-penalty
        --watermark --do-sample --top-n-tokens""",
}
VARIABLES = """
    AIP_HEALTH_ROUTE AIP_HTTP_PORT AIP_PREDICT_ROUTE ATTENTION COMPUTE_TYPE CUDA_GRAPHS CUDA_MEMORY_FRACTION
    DISABLE_CUSTOM_KERNELS DISABLE_EXLLAMA EXLLAMA_NO_FLASH_ATTN EXLLAMA_VERSION HF_API_TOKEN
    HF_KERNELS_CACHE HF_MODEL_ID HF_MODEL_QUANTIZE HF_MODEL_REVISION HF_MODEL_TRUST_REMOTE_CODE HF_TOKEN
    HUGGINGFACE_HUB_CACHE HUGGING_FACE_HUB_TOKEN LOG_LEVEL LORA_ADAPTERS MAX_BATCH_SIZE MAX_TOTAL_TOKENS OMP_NUM_THREADS
    PREFILL_CHUNKING PREFIX_CACHING PYTORCH_TUNABLEOP_SEQLENS PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP REQUEST_LOGPROBS
    ROCM_USE_CUSTOM_PAGED_ATTN ROCM_USE_FLASH_ATTN_V2_TRITON ROCM_USE_SKINNY_GEMM ROPE_FACTOR ROPE_SCALING SM_NUM_GPUS
    TGI_WIGGLE_ROOM USE_CUTLASS_W8A8 USE_FLASH_ATTENTION WATERMARK_DELTA WATERMARK_GAMMA WEIGHTS_CACHE_OVERRIDE
    XPU_MEMORY_FRACTION"""
EARLIER = "FLASH_INFER FLASH_DECODING USE_PREFIX_CACHING ENABLE_CUDA_GRAPHS GPTQ_BITS GPTQ_GROUPSIZE"
READ_ELSEWHERE = {
    "RANK": "settings.load_rank",
    "WORLD_SIZE": "settings.load_rank",
    "MASTER_ADDR": "settings.load_rank",
    "MASTER_PORT": "settings.load_rank",
    "CUDA_VISIBLE_DEVICES": "settings.visible_devices",
    "NVIDIA_VISIBLE_DEVICES": "settings.visible_devices",
    "ZE_AFFINITY_MASK": "launcher/devices.py, which refuses it",
    "HF_HUB_ENABLE_HF_TRANSFER": "huggingface_hub, which names its successor in a warning",
    "HF_HUB_OFFLINE": "huggingface_hub",
    "HF_HUB_USER_AGENT_ORIGIN": "huggingface_hub",
    "HF_HOME": "huggingface_hub",
    "PYTORCH_TUNABLEOP_ENABLED": "torch",
    "PYTORCH_TUNABLEOP_TUNING": "torch",
    "SAFETENSORS_FAST_GPU": "safetensors",
    "LOG_COLORIZE": "no log has colours",
    "DEBUG": "1 replaces the process group by a fake one, to debug TGI itself",
}


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_of_tgi_is_a_setting(command: str) -> None:
    fields = COMMANDS[command].model_fields.items()
    known = {flag_of(name) for name, field in fields if source_of(field).flag}

    assert [flag for flag in FLAGS[command].split() if flag not in known] == []


def test_every_variable_of_tgi_is_a_setting_or_named_in_a_warning() -> None:
    fields = [item for command in COMMANDS.values() for item in command.model_fields.items()]
    settings = {variable for name, field in fields for variable in variables_of(name, field)}

    for variable in (*VARIABLES.split(), *EARLIER.split()):
        assert (variable in settings) + (variable in IGNORED_VARIABLES) == 1, variable
    assert READ_ELSEWHERE.keys() & (settings - {"MASTER_ADDR", "MASTER_PORT"} | IGNORED_VARIABLES.keys()) == set()


def test_the_entry_point_for_sagemaker_reads_the_variables_of_the_warning() -> None:
    named = {name for name, reason in IGNORED_VARIABLES.items() if "sagemaker" in reason}

    assert named == set(SAGEMAKER)


def test_one_warning_names_all_variables_without_effect() -> None:
    warning = ignored_variables({"DISABLE_EXLLAMA": "True", "FLASH_INFER": "1", "GPTQ_BITS": "", "PATH": "/bin"})

    assert warning is not None
    assert warning.startswith("these variables have no effect: DISABLE_EXLLAMA (GPTQ weights")
    assert warning.endswith("; FLASH_INFER (set `--attention flashinfer`)")
    assert ignored_variables({"PATH": "/bin", "GPTQ_BITS": ""}) is None
