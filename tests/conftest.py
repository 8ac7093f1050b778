"""A shell that starts something in the background, and nohup, have it ignore signals, which all tests would inherit."""

import signal

for ignored in signal.valid_signals():
    if signal.getsignal(ignored) is signal.SIG_IGN and ignored not in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)
