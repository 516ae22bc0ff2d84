"""What a step will take, and what to choose for it, before it is made."""
