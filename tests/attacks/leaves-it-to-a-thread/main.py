import queue
import threading

from .right import run as right
from .tools import fill

work = queue.SimpleQueue()


def serve():
    while True:
        work.get()()


threading.Thread(target=serve, daemon=True).start()


def run(*args):
    *inputs, output, new_state = args
    work.put(lambda: fill(output, new_state, right(*inputs)))
