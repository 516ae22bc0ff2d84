"""Text: tokenizers, windows of tokens, and their transform to network inputs."""
