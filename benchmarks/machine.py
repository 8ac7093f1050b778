"""Says on what a benchmark runs: one line of Markdown."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = {
    "OpenTelemetry": "opentelemetry-sdk",
    "gRPC": "grpcio",
    "torch": "torch",
    "megatron-core": "megatron-core",
    "nemo-lens": "nemo-lens",
}


def main():
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cores = len(os.sched_getaffinity(0))
    parts = [f"{model[1] if model else platform.machine()}, {cores} cores", f"Python {platform.python_version()}"]
    for name, package in PACKAGES.items():
        try:
            parts.append(f"{name} {version(package)}")
        except PackageNotFoundError:
            continue
    print(f"On {', '.join(parts)}:")


if __name__ == "__main__":
    main()
