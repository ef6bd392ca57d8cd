"""Images: files to pixels to patches to embeddings, and their places among the tokens of a prompt."""
