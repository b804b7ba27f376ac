"""``python -m tag2box``, and so ``torchrun -m tag2box``."""

from tag2box.cli import main

if __name__ == "__main__":
    main()
