"""A fault campaign: ranks die, stop, err and diverge, disks fill, files rot, rails break, at random moments of training."""
