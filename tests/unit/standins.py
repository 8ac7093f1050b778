"""What stands for other people's things in unit tests."""


class Store(dict):
    """The store of torch.distributed, in the process, where a rank has drawn this word for the run already."""

    def __init__(self, word=None):
        super().__init__({} if word is None else {"megatron_autoinstrument.run": word})

    def compare_set(self, key, expected, desired):
        if self.get(key, "") == expected:
            self[key] = desired
        return self.get(key, expected).encode()

    def add(self, key, amount):
        self[key] = self.get(key, 0) + amount
        return self[key]
