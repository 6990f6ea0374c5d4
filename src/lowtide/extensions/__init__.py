"""What a limit does beyond one device and recomputation, a package each (`lowtide.extension`)."""
