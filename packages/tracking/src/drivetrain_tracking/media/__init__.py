"""Images, audio, video, tables, histograms, texts, figures and artifacts: the media that one can log."""
