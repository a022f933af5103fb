"""Draws all pictures of docs/architecture.md."""

from __future__ import annotations

from docs.pictures import lives, rooms

if __name__ == "__main__":
    for target in (rooms.draw(), *lives.draw()):
        print(target)
