"""Images, audio, video, tables, histograms, texts, figures and artifacts: what is logged besides numbers."""
