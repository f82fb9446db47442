from unusable import package

__getattr__ = package("torchaudio")
__version__ = "0"
