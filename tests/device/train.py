"""The tiny GPT as check.py has it train: a rank that may be instrumented, and that counts where its host waits for the
device. DEVICE_CHECK is a list of `instrumented` and `syncs`. With CUDA_ON_CPU=1 there are stand-ins for CUDA graphs and
for the calls that wait.
"""

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

ASKED = os.environ["DEVICE_CHECK"].split(",")
ON_CPU = os.environ["CUDA_ON_CPU"] == "1"
FIRST = 3  # the iteration that is watched first: before it Megatron warms up
SYNCHRONIZING = "called a synchronizing CUDA operation"  # torch's words

if ON_CPU:
    sys.path.append(str(Path(__file__).parents[1] / "megatron" / "scripts"))
    import with_cuda_graphs  # noqa: F401
import pretrain_tiny_gpt  # noqa: E402  (first: it must precede every Megatron import)
import torch  # noqa: E402
from megatron.training import get_args, training  # noqa: E402

sites: Counter[str] = Counter()


def stand_in_for_synchronization():
    """Has what would wait for a device do what torch does there in its debug mode."""
    mode = "default"

    def set_mode(new):
        nonlocal mode
        mode = new

    def waiting(function):
        def call(*args, **kwargs):
            if mode == "error":
                raise RuntimeError(SYNCHRONIZING)
            if mode == "warn":
                warnings.warn(SYNCHRONIZING, stacklevel=2)
            return function(*args, **kwargs)

        return call

    torch.cuda.set_sync_debug_mode = set_mode
    torch.cuda.get_sync_debug_mode = lambda: mode
    torch.Tensor.item, torch.Tensor.tolist = waiting(torch.Tensor.item), waiting(torch.Tensor.tolist)


def noted(message, category, filename, lineno, file=None, line=None, show=warnings.showwarning):
    if SYNCHRONIZING not in str(message):
        show(message, category, filename, lineno, file, line)
        return
    # The innermost frame that is neither Python's nor the stand-in's: where it was asked for.
    frames = [frame for frame in traceback.extract_stack() if frame.filename not in (warnings.__file__, __file__)]
    frame = frames[-1] if frames else None
    sites[f"{place(frame.filename)}:{frame.lineno} {frame.name}" if frame else "elsewhere"] += 1


def place(filename):
    """A file as it is called from where its package lies."""
    roots = [root for root in map(Path, sys.path) if root.is_absolute() and Path(filename).is_relative_to(root)]
    return str(Path(filename).relative_to(max(roots, key=lambda root: len(root.parts)))) if roots else filename


def strict(call):
    """`call`, in which nothing may wait for the device."""

    def without_waiting(*args):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return without_waiting


def strictly(make):
    def hook(original, recorder):
        made = make(original, recorder)
        return patching.Hook(strict(made.begin), strict(made.end))

    return hook


def watch(*args, decide=training.checkpoint_and_decide_exit, **kwargs):
    """Runs after each iteration."""
    if get_args().curr_iteration + 1 == FIRST - 1:
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
    return decide(*args, **kwargs)


if "syncs" in ASKED:
    if ON_CPU:
        stand_in_for_synchronization()
    training.checkpoint_and_decide_exit = watch
if "instrumented" in ASKED:
    from megatron_autoinstrument import MegatronInstrumentor, targets
    from megatron_autoinstrument.megatron import patching

    if "syncs" in ASKED:
        patching.reraise_internal_errors = True
        targets.SEAMS = tuple(
            # Megatron's log reads the loss, which waits, and the hook reads it after that.
            seam if seam.path == "training_log" else replace(seam, hook=strictly(seam.hook))
            for seam in targets.SEAMS
        )
    MegatronInstrumentor().instrument()

pretrain_tiny_gpt.main()
os.write(1, f"\nSYNCS {json.dumps(sites)}\n".encode())
