"""States kept by position: where they are taken, what they cost, who goes first, and how they lie on disk."""
