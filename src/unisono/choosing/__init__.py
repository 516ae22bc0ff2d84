"""Choice of a schedule by payload size: from a readable and editable table in a file, or by predicted time."""
