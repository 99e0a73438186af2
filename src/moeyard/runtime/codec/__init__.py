"""Experts on their way across slow links in few bytes: what a codec is, messages, and who encodes and decodes them on which device."""
