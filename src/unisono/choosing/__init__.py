"""Which schedule serves which size: by a table in a file that a person can read and edit, or by price."""
