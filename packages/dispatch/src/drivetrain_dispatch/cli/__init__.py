"""Plan which device, or the disk, holds each part of a model, before anything is loaded."""
