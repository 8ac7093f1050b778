"""Trains the tiny GPT to an end in the middle of its fourth iteration, in torchrun's first attempt: END says which.

END is a list of `what@rank`, or `what` for every rank: `raise`, `sleep` (in Python), `exit` (with an error, from the
loop), `duration` (what Megatron took for the start is long ago), `SIG…` (to itself), `SIG…-launcher` (to torchrun), or
`rl` (the end of Megatron's reinforcement learning, which its wheels lack).
"""

import os
import signal
import sys
import time
import types

END = dict.fromkeys(["0", "1"], "")
for word in os.environ["END"].split(","):
    what, _, rank = word.partition("@")
    END.update({rank: what} if rank else dict.fromkeys(END, what))
END = END[os.environ["RANK"]] if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else ""

rl_utils = types.ModuleType("megatron.rl.rl_utils")
exec("def rl_inference_interface_shutdown():\n    import os\n    os._exit(0)", vars(rl_utils))
if END == "rl":
    sys.modules[rl_utils.__name__] = rl_utils  # before Megatron: as if it had imported it

import pretrain_tiny_gpt  # noqa: E402
from megatron.training import get_args, training  # noqa: E402

forward_step, decide = pretrain_tiny_gpt.forward_step, training.checkpoint_and_decide_exit
done = False


def forward_step_that_ends(data_iterator, model):
    global done
    if model.training and get_args().curr_iteration == 3 and not done:
        done = True
        print(f"RANK {os.environ['RANK']} ENDS {time.time()}", flush=True)
        if END == "raise":
            raise RuntimeError("this rank crashes")
        if END == "duration":
            training._TRAIN_START_TIME -= 3600
        if END.startswith("SIG"):
            name, _, launcher = END.partition("-")
            time.sleep(1)  # the other rank waits for this one by now, in gloo's C++
            os.kill(os.getppid() if launcher else os.getpid(), getattr(signal, name))
        if END == "sleep" or END.endswith("-launcher"):
            time.sleep(60)
    return forward_step(data_iterator, model)


def decide_that_ends(*args, **kwargs):
    if done and END == "rl":
        rl_utils.rl_inference_interface_shutdown()
    if done and END == "exit":
        sys.exit(1)
    return decide(*args, **kwargs)


pretrain_tiny_gpt.forward_step = forward_step_that_ends
training.checkpoint_and_decide_exit = decide_that_ends
pretrain_tiny_gpt.main()
