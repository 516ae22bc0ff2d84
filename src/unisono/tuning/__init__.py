"""Which schedule serves which size: a table in a file that a person can read and edit."""
