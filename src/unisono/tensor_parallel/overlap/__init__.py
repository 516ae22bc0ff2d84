"""Exchanges of activations beside the products of the same layer, in slices of the samples (PCL-DNN section 3.4).

slices ── how many ──▶ schedule ── data ──▶ player: products on the calling thread, exchanges on another
flows  ── which exchanges a layer has ──▶ passes: one pass of a layer ──▶ linear, convolution
"""
