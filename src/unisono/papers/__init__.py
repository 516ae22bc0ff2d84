"""Tables and figures of the five papers that Unisono is built from: theirs beside ours, predicted and measured."""
