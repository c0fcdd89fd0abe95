"""Training and evaluation of an SSD on a directory in Pascal VOC's format."""
