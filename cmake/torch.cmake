# lookahead::torch, the adapter for PyTorch: where there is a target `torch`, of a find_package(Torch) before, or else of
# LibTorch's package (Debian: libtorch-dev).
if(NOT TARGET torch)
  set(FPHSA_NAME_MISMATCHED ON) # it looks for parts by names of others, of which CMake warns
  find_package(Torch CONFIG QUIET)
  unset(FPHSA_NAME_MISMATCHED)
endif()
if(TARGET torch)
  add_library(lookahead::torch INTERFACE IMPORTED GLOBAL)
  target_link_libraries(lookahead::torch INTERFACE lookahead::lookahead ${TORCH_LIBRARIES})
endif()
