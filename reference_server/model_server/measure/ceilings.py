"""What the device could do at best, measured in the run that is judged by it."""

import torch

from reference_server.model_server.measure.record import Plan, Record, median_and_spread, smi_facts

EMPTY_KERNELS = 100


def measure(record: Record, plan: Plan) -> None:
    """Copy and read bandwidth in bytes a second, products in FLOP a second, and what a launched kernel costs."""
    device = record.device
    source = torch.empty(plan.ceiling_bytes // 2, dtype=torch.int16, device=device).random_()
    target = torch.empty_like(source)
    copy_ms, _ = median_and_spread(device, lambda: target.copy_(source), 2, 6)
    record.ceilings["copy_bytes_per_s"] = 2 * source.nbytes / copy_ms * 1e3
    words = source.view(torch.float32).nan_to_num_()
    read_ms, _ = median_and_spread(device, words.sum, 2, 6)
    record.ceilings["read_bytes_per_s"] = source.nbytes / read_ms * 1e3
    # Random data: zeros draw less power and run at higher clocks.
    left = torch.randn(plan.square, plan.square, device=device).to(torch.bfloat16)
    right = torch.randn(plan.square, plan.square, device=device).to(torch.bfloat16)
    product_ms, _ = median_and_spread(device, lambda: left @ right, 3, 10)
    record.ceilings["bf16_flop_per_s"] = 2 * plan.square**3 / product_ms * 1e3
    # The clocks of a device that has just been at work.
    record.device_facts |= smi_facts(device)
    if device.type == "cuda":
        record.ceilings["us_per_graphed_kernel"] = _graphed_kernel_us(device)


def _graphed_kernel_us(device: torch.device) -> float:
    """One of many smallest kernels in a graph, each waiting for the one before."""
    number = torch.zeros(1, device=device)
    number.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(EMPTY_KERNELS):
            number.add_(1)
    replay_ms, _ = median_and_spread(device, graph.replay, 3, 20)
    return replay_ms * 1e3 / EMPTY_KERNELS
