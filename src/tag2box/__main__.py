"""``python -m tag2box``, and so ``torchrun -m tag2box``."""

from __future__ import annotations

from tag2box.cli import main

if __name__ == "__main__":
    main()
