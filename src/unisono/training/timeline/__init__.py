"""Timeline of a run: the spans of all ranks in lanes, the predicted spans of each step under the measured ones."""
