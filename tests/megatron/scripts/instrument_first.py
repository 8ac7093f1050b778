"""A user's script that instruments before it imports Megatron."""

from megatron_autoinstrument import MegatronInstrumentor

MegatronInstrumentor().instrument()

import pretrain_tiny_gpt  # noqa: E402

pretrain_tiny_gpt.main()
