"""Prints the configuration that Accelerate hands to DeepSpeed, without training. README.md has the commands."""

from accelerate import Accelerator
from accelerate.state import AcceleratorState


def main() -> None:
    accelerator = Accelerator()
    accelerator.print(f"{AcceleratorState()}")


if __name__ == "__main__":
    main()
