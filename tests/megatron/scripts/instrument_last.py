"""A user's script that instruments when Megatron is imported and its names are bound, here and in another module."""

import pretrain_tiny_gpt
from megatron.training import pretrain

from megatron_autoinstrument import MegatronInstrumentor

original = [pretrain]  # in a list, where no one looks for it
MegatronInstrumentor().instrument()

assert pretrain is not original[0], "the name in __main__ was rebound"
assert pretrain is pretrain_tiny_gpt.pretrain
pretrain_tiny_gpt.main()
