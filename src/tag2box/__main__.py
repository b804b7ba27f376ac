"""``python -m tag2box``, and so ``torchrun -m tag2box``; the ``tag2box`` program starts here, too."""

import os
import signal


def main() -> None:
    """Import and run the program; Ctrl-C before it is imported ends with one line, too."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    from tag2box.parallel import wait_passively

    wait_passively()  # before anything imports torch
    from tag2box import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


def _exit_at_once(number: int, frame: object) -> None:
    os.write(2, b"tag2box: stopped\n")
    os._exit(130)


if __name__ == "__main__":
    main()
