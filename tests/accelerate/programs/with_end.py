"""A program that ends its run, and says whether its process group has ended with it."""

import json
import sys

import torch.distributed as dist

from accelerate import Accelerator


def main() -> None:
    if "--own-group" in sys.argv:
        dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    before = dist.is_initialized()
    accelerator.end_training()
    if accelerator.is_main_process:
        print("FOUND", json.dumps([before, dist.is_initialized(), accelerator.num_processes]))


if __name__ == "__main__":
    main()
