"""What goes wrong between ranks: the errors, who is to blame, which nics are dead."""
