"""gdn.serving.vllm under its old name, for one release."""

from gdn.serving.vllm import *  # noqa: F403

if __name__ == "__main__":
    from runpy import run_module

    run_module("gdn.serving.vllm", run_name="__main__")
