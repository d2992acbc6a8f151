include(${CMAKE_CURRENT_LIST_DIR}/lookahead-targets.cmake)

# A part that needs more than a C++ compiler installs a file of its own here, which defines the target of its name.
foreach(component IN LISTS lookahead_FIND_COMPONENTS)
  include(${CMAKE_CURRENT_LIST_DIR}/components/${component}.cmake OPTIONAL)
  if(TARGET lookahead::${component})
    set(lookahead_${component}_FOUND TRUE)
  elseif(lookahead_FIND_REQUIRED_${component})
    set(lookahead_FOUND FALSE)
    set(lookahead_NOT_FOUND_MESSAGE "this installation of lookahead has no component ${component}, or cannot find what it needs")
  endif()
endforeach()
