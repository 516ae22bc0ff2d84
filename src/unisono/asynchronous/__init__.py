"""Workers and servers of asynchronous rules: their messages, exchanges, decisions and event logs."""
