"""After us, replaces the training loop's functions by copies, one by a changed copy of its source, and one by a wrapper
that doesn't say so, as adaptors of Megatron for other devices do; the copies once more, as one that takes back."""

import cuda_on_cpu  # noqa: F401, I001  (first: it must precede every Megatron import)
import inspect
import types

import megatron.training.training as training
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer


def copied(function):
    function = inspect.unwrap(function)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def passing_on(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


for _ in range(2):
    for name in ("train", "train_step", "evaluate"):
        setattr(training, name, copied(getattr(training, name)))
    schedules.forward_backward_no_pipelining = copied(schedules.forward_backward_no_pipelining)
    TransformerLayer.forward = passing_on(TransformerLayer.forward)

new = {}
anchor = "    args = get_args()\n"
source = inspect.getsource(training.training_log)
assert anchor in source
exec(source.replace(anchor, anchor + "    print('CHANGED')\n", 1), training.training_log.__globals__, new)
training.training_log = new["training_log"]

import pretrain_tiny_gpt  # noqa: E402

pretrain_tiny_gpt.main()
