"""megatron/core/pipeline_parallel/fine_grained_activation_offload.py: activations on their way to the host and back.

One span for each tensor that is copied, as in Megatron's own telemetry. Its `bulk_*` methods handle a group of
tensors, of which perhaps none is copied, and miss the tensor that backward needs before its group is reloaded. Copies
run on streams of their own: a span covers the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_autoinstrument.megatron import torch_state
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.recording.recorder import span

_MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


def _copy(name: str) -> Callable[[Function, frozenset[str]], Hook]:
    def hook(original: Function, groups: frozenset[str]) -> Hook:
        is_capturing, launch = torch_state.is_capturing(), span(name)(original, groups)

        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
            return None if is_capturing() else launch.begin(args, kwargs)

        return Hook(begin, launch.end)

    return hook


SEAMS = (
    Seam(_MODULE, "ChunkOffloadHandler.offload", {"activation_offload"}, _copy("megatron.activation.offload")),
    Seam(_MODULE, "ChunkOffloadHandler.reload", {"activation_offload"}, _copy("megatron.activation.reload")),
)
