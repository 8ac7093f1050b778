"""A user's script that says when it has done its work, and when Python has run all that was to run at the exit."""

import os
import time

if os.environ.get("INSTRUMENT_HERE"):
    from megatron_autoinstrument import MegatronInstrumentor

    MegatronInstrumentor().instrument()

import pretrain_tiny_gpt


class Leaving:
    """Goes with this module, which is after the exit's functions, those that were registered first included."""

    say, now = staticmethod(os.write), staticmethod(time.time)

    def __del__(self):
        self.say(1, f"\nLEFT AT {self.now()}\n".encode())


leaving = Leaving()
pretrain_tiny_gpt.main()
print("DONE AT", time.time(), flush=True)
