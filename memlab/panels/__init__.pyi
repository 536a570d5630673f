from .bits import BitExplorer as BitExplorer
from .calculator import Calculator as Calculator
from .explorers import PaddingExplorer as PaddingExplorer
from .explorers import TilePlayer as TilePlayer
from .sandbox import AllocatorSandbox as AllocatorSandbox
from .segments import SegmentFilm as SegmentFilm
from .serving_calculator import ServingCalculator as ServingCalculator
