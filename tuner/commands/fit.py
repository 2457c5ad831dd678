"""`tgi-tune fit`: prints the quantizations of a model that fit on given GPUs, computed from its config.json."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loadgen.errors import UsageError
from loadgen.program import Command

if TYPE_CHECKING:
    from tuner.servers.tgi.model_fit import DecoderSize, GpuGroup, MethodFit

GIB = 2**30
NOTHING_FITS = 1


def add_fit_flags(parser: argparse.ArgumentParser) -> None:
    from tuner.servers.tgi.gpu_memory import GPUS

    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Model: directory with a config.json, preset:NAME, or hub repository."
    )
    parser.add_argument(
        "--numbers",
        default="",
        metavar="KEY=VALUE,…",
        help="Fields of config.json, which override those of MODEL. Without MODEL, these are all fields.",
    )
    parser.add_argument("--revision", metavar="REV", help="Branch, tag or commit of a hub repository.")
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME",
        help=f"Type of GPU: {', '.join(GPUS)}; or its memory, such as 24GiB.",
    )
    parser.add_argument(
        "--count", type=int, default=1, metavar="N", help="Number of GPUs that share the model. Default 1."
    )
    parser.add_argument(
        "--cuda-memory-fraction",
        type=float,
        default=1.0,
        metavar="X",
        help="Setting of the launcher: fraction of a GPU's memory that the server may use. Default 1.",
    )
    parser.add_argument(
        "--max-batch-prefill-tokens",
        type=int,
        metavar="N",
        help="Setting of the launcher: prompt tokens of one prefill. Default: the launcher's default for this GPU.",
    )
    parser.add_argument(
        "--reserve-gib",
        type=float,
        default=1.0,
        metavar="X",
        help="Memory of each GPU that the driver, the CUDA context and kernels take, in GiB. Default 1.",
    )
    parser.add_argument(
        "--input-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="Number of prompt tokens of a request. Default 1000.",
    )
    parser.add_argument(
        "--output-tokens", type=int, default=200, metavar="N", help="Number of output tokens of a request. Default 200."
    )
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")


def fit(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Print each value of `--quantize` with its weights and K/V tokens. Exit code 1 if no method fits one request."""
    from tuner.servers.tgi.gpu_memory import find_gpu
    from tuner.servers.tgi.model_fit import GpuGroup, fits, read_config, size_of

    _check(args)
    config = read_config(args.model, _numbers(args.numbers), args.revision)
    group = GpuGroup(
        find_gpu(args.gpu),
        args.count,
        args.cuda_memory_fraction,
        round(args.reserve_gib * GIB),
        args.max_batch_prefill_tokens,
    )
    size, rows, tokens = size_of(config), fits(config, group), args.input_tokens + args.output_tokens
    if args.json:
        print(json.dumps(_content(size, group, rows, tokens), indent=2))
    else:
        print("\n".join(_lines(size, group, rows, tokens)))
    return 0 if any(row.requests_of(tokens) for row in rows) else NOTHING_FITS


def _check(args: argparse.Namespace) -> None:
    if args.model is None and not args.numbers:
        raise UsageError("MODEL is missing: set it, or set the fields of its config.json with --numbers")
    if not 0 < args.cuda_memory_fraction <= 1:
        raise UsageError(f"--cuda-memory-fraction is {args.cuda_memory_fraction:g}, but must be above 0 and at most 1")
    if not 0 <= args.reserve_gib < float("inf"):
        raise UsageError(f"--reserve-gib is {args.reserve_gib:g}, but must be a finite number of at least 0")
    for name in ("count", "input_tokens", "output_tokens", "max_batch_prefill_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}, but must be at least 1")


def _numbers(text: str) -> dict[str, Any]:
    """Fields of config.json. A value that is not JSON is a string."""
    found: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--numbers has {pair!r}, but must be KEY=VALUE,KEY=VALUE")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return found


def _content(size: "DecoderSize", group: "GpuGroup", rows: Sequence["MethodFit"], tokens: int) -> Mapping[str, Any]:
    return {
        "model": {
            "model_type": size.model_type,
            "parameters": size.parameters.total,
            "num_layers": size.num_layers,
            "num_heads": size.num_heads,
            "num_kv_heads": size.num_kv_heads,
            "head_dim": size.head_dim,
        },
        "gpu": {
            "name": group.gpu.name,
            "memory_mib": group.gpu.memory_mib,
            "count": group.count,
            "memory_fraction": group.memory_fraction,
            "budget_bytes": int(group.budget_bytes),
        },
        "kv_bytes_per_token": size.kv_bytes_per_token(),
        "kv_bytes_per_token_per_gpu": size.kv_bytes_per_token(group.count),
        "request_tokens": tokens,
        "methods": [
            {
                "quantize": row.method.name,
                "checkpoint": row.method.checkpoint,
                "weight_bytes": row.weight_bytes,
                "weight_bytes_per_gpu": row.weight_bytes_per_gpu,
                "kv_tokens": row.kv_tokens,
                "requests": row.requests_of(tokens),
                "refusal": row.refusal,
            }
            for row in rows
        ],
    }


def _lines(size: "DecoderSize", group: "GpuGroup", rows: Sequence["MethodFit"], tokens: int) -> list[str]:
    whole, part = size.kv_bytes_per_token() / 1024, size.kv_bytes_per_token(group.count) / 1024
    names = [row.method.name for row in rows if row.requests_of(tokens)]
    return [
        f"{size.model_type}: {size.parameters.total:,} parameters, {size.num_layers} layers, {size.num_heads} heads, "
        f"{size.num_kv_heads} K/V heads of {size.head_dim}",
        f"{group.count} x {group.gpu.name}: {group.budget_bytes / GIB:.1f} of {group.gpu.memory_mib / 1024:.1f} GiB "
        "each for weights, the largest prefill and K/V",
        f"K/V of one token: {whole:,.4g} KiB, {part:,.4g} KiB on each GPU",
        "",
        *_table(rows, tokens),
        "",
        f"fits: {', '.join(names)}" if names else f"no method fits one request of {tokens:,} tokens",
        "Sizes of weights and K/V are computed, that of the prefill is estimated. The server measures all at warm-up.",
    ]


def _table(rows: Sequence["MethodFit"], tokens: int) -> list[str]:
    head = (
        "--quantize",
        "weights GiB",
        "per GPU",
        "K/V tokens",
        f"requests of {tokens:,}",
        "checkpoint, or reason",
    )
    cells = [head]
    for row in rows:
        sizes = (f"{row.weight_bytes / GIB:.1f}", f"{row.weight_bytes_per_gpu / GIB:.1f}")
        room = (f"{row.kv_tokens:,}", f"{row.requests_of(tokens):,}") if row.refusal is None else ("-", "-")
        cells.append((row.method.name, *sizes, *room, row.refusal or row.method.checkpoint))
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(_aligned(each, widths)).rstrip() for each in cells]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The first and the last column aligned to the left, the columns with numbers to the right."""
    last = len(cells) - 1
    return [
        cell.ljust(width) if column in (0, last) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


EXAMPLES = (
    "preset:llama-3.1-8b --gpu l4",
    "./my-model --gpu a10g --count 4 --input-tokens 2000 --json",
    "--numbers model_type=llama,num_hidden_layers=80,hidden_size=8192,intermediate_size=28672,num_attention_heads=64,"
    "num_key_value_heads=8,vocab_size=128256 --gpu 24GiB --count 4",
)
COMMAND = Command(
    "Show which quantizations of a model fit in the memory of GPUs, without a launch.", add_fit_flags, fit, EXAMPLES
)
