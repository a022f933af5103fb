"""Matrix products at the borders of regions, which compute and communicate at the same time."""
