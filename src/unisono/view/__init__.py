"""Pictures: functions from what was planned or measured to text or to a document.

svg.py ◀── schedule.py, step.py                written by hand: SVG and text
chart.py ◀── heat_map.py, predictions.py       by matplotlib, which the extra `view` installs

All have one typeface, and follow the reader's light or dark scheme. Records of rooms below are read as they are; rooms
above give plain numbers.
"""
