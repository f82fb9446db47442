from unusable import package

__getattr__ = package("torchvision")
__version__ = "0"
