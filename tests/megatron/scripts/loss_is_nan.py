"""The loss is NaN from the third step on, and the user logs what it is."""

import logging

import pretrain_tiny_gpt

calls = 0
loss_function = pretrain_tiny_gpt.loss_function


def with_nan(mask, output):
    global calls
    calls += 1
    if calls > 2:
        output = output * float("nan")
        logging.getLogger("user").error("bad loss", extra={"loss": float("nan"), "seen": [1.0, float("-inf")]})
    return loss_function(mask, output)


pretrain_tiny_gpt.loss_function = with_nan

if __name__ == "__main__":
    pretrain_tiny_gpt.main()
