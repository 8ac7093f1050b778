"""A user's script that says when it has done its work; what the process takes from then on is its exit."""

import os
import time

if os.environ.get("INSTRUMENT_HERE"):
    from megatron_autoinstrument import MegatronInstrumentor

    MegatronInstrumentor().instrument()

import pretrain_tiny_gpt

pretrain_tiny_gpt.main()
print("DONE AT", time.time(), flush=True)
