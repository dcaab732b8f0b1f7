"""Start a real SGLang 0.5.16 server on a CPU, without its CUDA kernels. Only for tests.

    python tests/sglang/sglang_cpu.py --model-path CHECKPOINT --port 32000 …

Takes the flags of `sglang.launch_server`. Everything runs SGLang's own code but for what its CPU build lacks and is
written here: the copies of token slots and of slots of the caches, the top-k of a router of experts, pinned memory, and
the attention of drafts. The top-k makes it no witness for routing ties: which of two experts with equal scores wins is
this file's answer, not that of SGLang's kernel.

The top level runs in the spawned scheduler and detokenizer as well: they import the main module again.
"""

import ctypes
import importlib.machinery
import os
import sys
import types

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # after the environment that its users read

CPU_FLAGS = [
    "--device=cpu", "--attention-backend=torch_native", "--sampling-backend=pytorch", "--grammar-backend=none",
    "--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup", "--mem-fraction-static=0.3",
]  # fmt: skip


def declare_torchvision() -> list[torch.library.Library]:
    """Operators that torchvision's Python registers fake kernels for; its own library is a CUDA build."""
    library = torch.library.Library("torchvision", "DEF")
    pooling = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool")
    for name in ("nms", "qnms", "qroi_align", "deform_conv2d", "_deform_conv2d_backward", *pooling,
                 *(f"_{name}_backward" for name in pooling)):
        library.define(f"{name}(Tensor x) -> Tensor")
    return [library]


def without_pinning() -> None:
    """SGLang pins memory for experts and adapters, which needs an accelerator; its weight check waits for one."""
    def unpinned(make):
        return lambda *sizes, pin_memory=False, **options: make(*sizes, **options)

    for name in ("empty", "zeros", "full", "tensor"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor  # it compares on the accelerator
    torch.Tensor.cpu = lambda tensor, *args, **options: tensor.clone()  # a snapshot has to be a copy


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, stride=None) -> None:
    """Row r of `req_to_token` gets the next slots of `out_cache_loc` at start[r]:end[r]."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first]
        at += last - first


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources) -> None:
    """In each cache, `strides` bytes a slot, the slots `sources` go to `targets`."""
    for begin, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(begin + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(begin + target * size, row, size)


def topk_softmax_cpu(hidden_states, gating_output, topk, renormalize):
    """([tokens, topk] float32 weights, [tokens, topk] int32 experts) of the router's scores."""
    weights, experts = torch.topk(torch.softmax(gating_output.float(), -1), topk, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.float(), experts.int()


def absent(name: str):
    """Kernels that modules import by name and that nothing here calls."""
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

    kernel.__name__ = name
    return kernel


class Kernels(torch._ops._OpNamespace):
    """torch.ops.sgl_kernel: modules look up kernels for the CPU there that nothing here calls."""

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.endswith("_cpu"):
                return absent(name)
            raise


def stand_in_for_kernels() -> list[torch.library.Library]:
    """Put a module in the place of sgl_kernel."""
    module = types.ModuleType("sgl_kernel")
    module.__version__, module.__path__ = "0.0.0", []
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu
    module.copy_all_layer_kv_cache_cpu = copy_all_layer_kv_cache_cpu
    module.__getattr__ = absent
    sys.modules["sgl_kernel"] = module
    torch.ops.sgl_kernel = Kernels("sgl_kernel")
    library = torch.library.Library("sgl_kernel", "DEF")
    library.define("topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize)"
                   " -> (Tensor, Tensor)")
    library.impl("topk_softmax_cpu", topk_softmax_cpu, "CPU")
    return [library]


def draft_with_torch() -> None:
    """SGLang has no backend of torch's attention for what a draft is extended by."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    DraftBackendFactory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(self.draft_model_runner)


KEPT = [*declare_torchvision(), *stand_in_for_kernels()]  # a library that is collected takes its operators along
without_pinning()
if "--speculative-algorithm" in sys.argv:
    draft_with_torch()

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    sys.argv[0] = "sglang.launch_server"
    arguments = prepare_server_args([*CPU_FLAGS, *sys.argv[1:]])
    try:
        launch_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
